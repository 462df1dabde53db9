"""Our estimators inside the engines that others train with."""
