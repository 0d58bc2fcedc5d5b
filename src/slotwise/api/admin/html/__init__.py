"""The pages `/docs` and `/links` as HTML documents: one file each, with their style and script inside."""
