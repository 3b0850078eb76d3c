"""What the router itself costs, between engines that compute nothing."""
