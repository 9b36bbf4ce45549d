"""Steps that are traced for the first batches of a shape, and run by position from then on."""
