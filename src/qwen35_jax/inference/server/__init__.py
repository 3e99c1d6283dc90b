"""A server that speaks the OpenAI API, in front of one engine. It needs the `serve` extra."""
