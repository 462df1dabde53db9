"""Does an estimator, or any loss, do what it claims?  Every claim is decided both ways."""
