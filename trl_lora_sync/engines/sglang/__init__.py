"""SGLang: `spec` describes it, `engine` talks to a server."""
