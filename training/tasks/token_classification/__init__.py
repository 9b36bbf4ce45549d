"""Classification of the words of texts."""
