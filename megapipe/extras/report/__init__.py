"""HTML report of a run from the files in its folder, and drawings of schedules. `observer`, `kernels` import torch.

- `folder`:     the records of a run: segments, steps, evaluations, notes, profile, configuration
- `profile`:    reads profiles; `profile_summary`: plan and measurement of their steps, means, the table of both
- `trace`:      Chrome traces of a profile and of a simulated timeline
- `observer`:   what is said while a run trains: its `kernels`, profiles, `stragglers`
- `page`:       the HTML report, with page.css and page.js inlined; several runs: a table for the terminal and a page
- `charts`:     charts over steps and heat maps of experts' loads
- `comparison`: plan and measurement drawn with comparison.css, times of the stages, the report's section on them
- `goodput`:    the days of a run with failures and checkpoints
- `schedules`:  all schedule families side by side; `curves`: what ranks hold over a timeline
- `step_time`:  the predicted time of a step by parts, and of the all-to-alls of experts, as text
- `schedule_csv`: schedules read from CSV, those of parts written, too
- `timeline`:   a simulated timeline, of stages or of parts of layers, as SVG or text
- `grid`:       the grid of a plan's ranks, and context parallelism
- `status`:     the ranks of a run and what they do now, for `megapipe status`
- `explanation`: a flag, its paper (papers.csv) and its cost in memory and time, for `megapipe explain`
- `drawing`:    the elements of which all of them are made
"""
