"""Policy-gradient estimators for language models, as pure functions of tensors.

An estimator maps what was logged to a coefficient for each token,

    g = sum of C[p, g, t] * grad log pi(y[p, g, t] | prefix)        C constant under differentiation
    C = advantage * weight * aggregation * admission  (+ penalty);  centering adds head coefficients

Each stage has a module of that name; `estimator` composes them and `catalogue` names the published
compositions.  Nothing here touches a file, a clock, a log or a random state.
"""
