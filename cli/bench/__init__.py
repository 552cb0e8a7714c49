"""`mirrorsd bench`: questions in, Spec-Bench's answer lines, tables and a page out."""
