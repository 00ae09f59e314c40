"""Mixtures of experts of Hugging Face, a file for each or for its relatives: a table of names and one of settings, as
docs/conversion_family.md explains. `families` finds the files.
"""
