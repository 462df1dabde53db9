"""Problems whose bias and variance are known exactly, and the engines that compute them."""
