"""HTML report of a run from the files in its folder, and drawings of schedules. Needs no torch and no network.

- `folder`:     the records of a run: segments, steps, evaluations, notes, profile, configuration
- `page`:       the HTML report, with page.css and page.js inlined; several runs: a table for the terminal and a page
- `charts`:     charts over steps and heat maps of experts' loads
- `comparison`: plan and measurement of a step, drawn with comparison.css, and the report's section on them
- `goodput`:    the days of a run with failures and checkpoints
- `schedules`:  all schedule families side by side; `curves`: what ranks hold over a timeline
- `timeline`:   a simulated timeline, of stages or of parts of layers, as SVG or text
- `grid`:       the grid of a plan's ranks, and context parallelism
- `drawing`:    the elements of which all of them are made
"""
