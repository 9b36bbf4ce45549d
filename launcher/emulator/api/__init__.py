"""Google's APIs: pure functions from a call and the state to a response and the new state."""
