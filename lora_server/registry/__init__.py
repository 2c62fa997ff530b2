"""The registry: the state that outlives every process, in an SQLite file or in a PostgreSQL that servers share.

database   the connection, its schema, transactions
drains     adapters and servers that drain, and the adapters' deadlines
layouts    the layout that a server was resized to
leadership which of a server's controllers may write
attempts   updates that failed, or did not end
versions   versions of adapters by name, earlier ones too; adapters of a directory as they were read
"""
