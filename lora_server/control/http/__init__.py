"""Health, metrics and a page over HTTP.

server  one process's answers                       page/  to look at, live
limits  of what strangers may send
"""
