"""Questions with checked answers: one question, one answer, right or wrong."""
