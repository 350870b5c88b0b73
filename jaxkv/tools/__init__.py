"""Tell what a model takes and what its compiler says, on chips that need not be here."""
