"""What a study of a language model found, beside what the toy says."""
