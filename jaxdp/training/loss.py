"""What the iteration theorem has to know about a loss: three constants that nobody can check."""

from __future__ import annotations

import dataclasses

from jaxdp import iteration, validate


@dataclasses.dataclass(frozen=True)
class StronglyConvexLoss:
    """Constants of the loss of one example, f(w, x) = l(w, x) + r(w), on all of R^d.

    lipschitz: C >= |grad_w l(w, x)|, the data term alone (the regulariser is the same in both runs).
    smoothness: beta, Lipschitz constant of grad_w f. strong_convexity: rho >= 0, of the regulariser r
    (rho = 0: convex only). generalized_linear: l depends on w through one scalar <w, x>; only then does
    clipping per example keep the step a contraction.

    Assumes: the constants hold for every example that could occur, at every w; every step's gradient
    holds grad r in full, also where the batch is short or empty. Constants taken from the data (such as
    the largest norm of a feature vector) are not covered.

    Raises: ValueError unless 0 <= strong_convexity <= smoothness, lipschitz > 0.

    >>> from jaxdp import training
    >>> training.StronglyConvexLoss.logistic_regression(feature_norm=2.0, l2=0.5)
    StronglyConvexLoss(lipschitz=2.0, smoothness=1.5, strong_convexity=0.5, generalized_linear=True)
    """

    lipschitz: float
    smoothness: float
    strong_convexity: float = 0.0
    generalized_linear: bool = False

    def __post_init__(self):
        validate.positive("lipschitz", self.lipschitz)
        validate.positive("smoothness", self.smoothness)
        rho = validate.nonnegative("strong_convexity", self.strong_convexity)
        validate.reject("strong_convexity", rho, rho > self.smoothness, f"at most smoothness = {self.smoothness}")

    @classmethod
    def logistic_regression(cls, feature_norm: float, l2: float) -> StronglyConvexLoss:
        """Constants of log(1 + exp(-y <w, x>)) + l2 |w|^2 / 2 with |x| <= feature_norm, y in {-1, 1}.

        A bias column counts in the norm and is regularised with the rest. C = B, beta = B^2/4 + l2, rho = l2.
        """
        lipschitz, smoothness, rho = map(float, iteration.logistic_regression(feature_norm, l2))
        return cls(lipschitz, smoothness, rho, generalized_linear=True)

    @classmethod
    def softmax_regression(cls, feature_norm: float, l2: float) -> StronglyConvexLoss:
        """Constants of multinomial logistic regression: C = sqrt(2) B, beta = B^2/2 + l2, rho = l2.

        Clipping per example is refused for it: a clipped softmax step expands at every step size.
        """
        lipschitz, smoothness, rho = map(float, iteration.softmax_regression(feature_norm, l2))
        return cls(lipschitz, smoothness, rho)
