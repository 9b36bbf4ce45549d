"""What a person does with a run while its containers live: commands in them, and a view of what they do.

Nothing here changes a run: no event is recorded, no attempt begins or ends.
"""
