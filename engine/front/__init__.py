"""The HTTP front: text in, server-sent events out; it owns the engine process and never imports torch.

life      load, serve, drain, end           api       routes and handlers
process   the engine process itself         intake    bodies to jobs, and what is refused (pure)
link      requests out, tokens in           answer    OpenAI's answers, whole and in chunks (pure)
guard     connections that misbehave        exchange  one request: bounded body, errors, events
metrics   what Prometheus reads
"""
