"""Router decisions of a Mixture-of-Experts rollout, cached by token prefix."""
