"""Classification of whole texts."""
