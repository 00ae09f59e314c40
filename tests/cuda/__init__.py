"""Tests on a GPU: launch/test.sh --gpu. Expected values are computed on this machine's CPU."""
