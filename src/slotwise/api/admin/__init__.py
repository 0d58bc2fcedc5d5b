"""Routes for operators: scheduling, models, events, requests in progress, pages, and OpenAPI."""
