"""Learning studies: what estimators do to a small policy, with intervals over seeds."""
