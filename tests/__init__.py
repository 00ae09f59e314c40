"""The tests mirror megapipe/. A test's name states its claim; processes are started only through `tests.harness`."""
