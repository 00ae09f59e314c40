"""`megapipe doctor`: checks if an allocation is fit for a run, from what its hosts report and from measured groups.

- `host`:      what one host has and runs with, as one record; `resources`: its cores, memory and limits
- `remarks`:   what hosts lack, and in what they differ; pure
- `trials`:    what to measure on a layout, in rounds in which no rank takes part twice, and how
- `verdict`:   from times to slow groups and to the links that make them slow; pure
- `examination`: all of it on a running allocation
- `report`:    the result as text and as JSON
"""
