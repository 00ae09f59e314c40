"""Tests on a card: launch/test.sh --gpu. What they compare with is computed on this machine's CPU."""
