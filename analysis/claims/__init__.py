"""The documents' statements as rows that run: statement, measured figures, verdict."""
