"""The tests mirror megapipe/. A test's name is its claim; processes are started only through `tests.harness`."""
