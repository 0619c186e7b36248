"""`moonpool bench`: what this machine does, measured, beside the bars that the project holds itself to."""
