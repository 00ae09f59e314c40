"""`megapipe doctor`: checks if an allocation is fit for a run, from what its hosts report and from measured groups.

- `host`:        what one host has and runs with, as one record
- `timing`:      collectives and messages of growing sizes, timed
- `examination`: what to measure on a layout, in rounds in which no rank takes part twice; what is slow, and its causes;
  all of it on a running allocation, with remarks on what hosts lack and in what they differ
- `report`:      the result as text and as JSON
"""
