"""The search for the fastest layouts that fit a number of accelerators."""
