"""Google's APIs: pure functions from the emulator's state and a call to a response."""
