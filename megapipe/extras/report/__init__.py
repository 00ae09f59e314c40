"""HTML report of a run from the files in its folder, and drawings of schedules. Needs no torch and no network.

- `folder`:   the records of a run: segments, steps, evaluations, notes, profile, configuration
- `page`:     the HTML report, with page.css and page.js inlined
- `compare`:  several runs: a table for the terminal and an HTML page
- `charts`:   charts over steps as SVG
- `pipeline`: the section on plan and measurement; `comparison_svg`: its drawing, with comparison.css
- `timeline`: a simulated timeline as SVG or text
"""
