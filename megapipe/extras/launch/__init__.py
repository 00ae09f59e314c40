"""`megapipe launch`: torchrun with its flags and without its tracebacks, and a preview of where each rank will run."""
