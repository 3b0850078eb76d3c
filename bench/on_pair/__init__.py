"""`turnback bench` on a real pair on this machine, without and with a prefix cache on prefill."""
