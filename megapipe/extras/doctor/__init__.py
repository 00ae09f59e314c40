"""Is this allocation fit for the run: what its hosts have, and what every group of the layout reaches, measured in seconds.

- `host`:       what one host has and runs with, as one record
- `fast_paths`: which fast kernels are installed, and which torch takes
- `trials`:     what to measure on a layout, in rounds in which no rank is asked twice; pure
- `measure`:    carries the rounds out and gathers what they took
- `verdict`:    from times to slow groups and to the links that make them slow; pure
- `hosts`:      what hosts lack, and in what they differ; pure
- `words`:      all of it as text
"""
