"""Mixtures of experts of Hugging Face, a file for each or for its relatives: a table of names and one of settings, as
docs/convert.md explains. `families` finds the files.
"""
