"""What a dump of a real run tells: mismatch, faults, and which estimator its data supports."""
