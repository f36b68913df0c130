#!/bin/bash
# Runs a command on each of two machines, and ends with the status of the first that failed:
#     machines.sh HOSTS 'COMMAND OF node-a' 'COMMAND OF node-b'
# The machines are namespaces with a network, a name and an /etc/hosts (the file HOSTS) of their own, 10.9.0.1 and
# 10.9.0.2 on one cable. Files are shared.
set -e
if [ "$$" != 1 ]; then
    exec unshare --user --map-root-user --net --uts --mount --pid --mount-proc --kill-child bash "$0" "$@"
fi
hostname node-a
ip link set lo up
unshare --net --uts sleep infinity &
other=$!
on_other() { nsenter --target "$other" --net --uts "$@"; }
until [ "$(readlink "/proc/$other/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
on_other hostname node-b
ip link add name cable-a type veth peer name cable-b
ip link set cable-b netns "$other"
ip addr add 10.9.0.1/24 dev cable-a
ip link set cable-a up
on_other ip link set lo up
on_other ip addr add 10.9.0.2/24 dev cable-b
on_other ip link set cable-b up
mount --bind "$1" /etc/hosts
on_other bash -c "$3" &
second=$!
bash -c "$2" || failed=$?
wait "$second" || failed=${failed:-$?}
exit "${failed:-0}"
