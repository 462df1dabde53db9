"""An asynchronous pipeline of slots that write responses and a trainer that consumes them."""
