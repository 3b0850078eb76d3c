"""What Redis is asked to do in one step, as Lua.

**What was taken never comes back.** Redis can fall back to an older state: it restarts from a snapshot or a log
that lacks the last second, or a replica that missed a removal becomes master. So entry and note are stamped
with the *life* in which they were written, and are not there in any other. A life is the replication history,
``master_replid`` of ``INFO replication``:

- A server draws a new one when it starts as a master and whenever it becomes master. So each life has one server,
  the one that drew it, and is over for good once that server ends or becomes a replica: what a master loads
  from disk, or copies from its own replica before it is master again, bears the stamp of a life that is over.
  (``run_id`` would not do: it is still the same when a master was demoted, copied an older state from its
  replica and was promoted again.)
- A replica shows its master's life; it is refused for its role, even if it was made writable.
- Within a life the server's state has one line of changes, and GETDEL ends an entry in it.

A script asks for the life and reads or writes in one step, so the life is that of the server that does the work,
at that moment: connections, fail-overs with two masters at once, and a cluster's nodes, of which each has
its own life and a redirected call is done as a whole elsewhere, need no book-keeping. A new life costs the
entries of the one before: those turns are served plain. So does moving a cluster's slots, and, in Redis, the coming
of the first replica. What makes two servers of one life is not seen: copying a running machine, or a key by hand.

Keys are entry, note and last turn, of one conversation. What is kept is told in bytes and milliseconds. The first
argument is a word of the call's own, with which the answer begins: by it an answer is known to be that call's.
"""

LIFE = """
local info = redis.pcall('INFO', 'replication')
if type(info) ~= 'string' then
    return redis.error_reply('NOPERM INFO is not allowed: ' .. (type(info) == 'table' and info.err or 'no answer'))
end
if not string.find(info, 'role:master', 1, true) then
    return redis.error_reply('READONLY this server is a replica')
end
local life = string.match(info, 'master_replid:(%w+)')
if not life then
    return redis.error_reply('NOPERM INFO does not tell master_replid')
end
"""
REMOVE = f"{LIFE} return {{ARGV[1], life, redis.call('GETDEL', KEYS[1]), redis.call('GETDEL', KEYS[2])}}"
DISCARD = f"""{LIFE}
redis.call('GETDEL', KEYS[2])
redis.call('GETDEL', KEYS[3])
return {{ARGV[1], life, redis.call('GETDEL', KEYS[1])}}
"""
PUT = f"""{LIFE}
local before = redis.call('SET', KEYS[1], life .. ' ' .. ARGV[2], 'PX', ARGV[3], 'GET')
redis.call('SET', KEYS[2], life .. ' ' .. ARGV[4], 'PX', ARGV[5])
return {{ARGV[1], life, before, redis.call('SET', KEYS[3], ARGV[6], 'PX', ARGV[7], 'GET')}}
"""
NOTE_TURN = f"{LIFE} return {{ARGV[1], redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3], 'GET')}}"
RESTORE = f"""{LIFE}
local there = redis.call('GET', KEYS[1])
local stamp = there and string.match(there, '^(%w+) ')
if there and (not stamp or stamp == life) then
    return {{ARGV[1], 0}}
end
redis.call('SET', KEYS[1], life .. ' ' .. ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[2], life .. ' ' .. ARGV[4], 'PX', ARGV[5])
return {{ARGV[1], 1}}
"""
TELL = f"{LIFE} return life"
