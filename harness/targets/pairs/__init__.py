"""A producer, a consumer and the proxy outside of this process: on this machine, in containers, or running already."""
