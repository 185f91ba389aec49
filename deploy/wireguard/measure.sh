#!/bin/bash
# Bytes between two network namespaces, plain and over WireGuard in user space (wireguard-go).
# Needs root and: apt install wireguard-go wireguard-tools. It leaves nothing behind.
set -e
cd "$(mktemp -d)"
ip netns add hfwa; ip netns add hfwb
trap 'kill $PA $PB 2>/dev/null; ip netns del hfwa; ip netns del hfwb' EXIT
ip link add hfva type veth peer name hfvb
ip link set hfva netns hfwa; ip link set hfvb netns hfwb
ip -n hfwa addr add 10.98.0.1/24 dev hfva; ip -n hfwb addr add 10.98.0.2/24 dev hfvb
for n in a b; do ip -n hfw$n link set lo up; ip -n hfw$n link set hfv$n up; done
ip netns exec hfwa wireguard-go -f hfwga >/dev/null 2>&1 & PA=$!
ip netns exec hfwb wireguard-go -f hfwgb >/dev/null 2>&1 & PB=$!
for i in $(seq 50); do [ -S /var/run/wireguard/hfwga.sock -a -S /var/run/wireguard/hfwgb.sock ] && break; sleep 0.1; done
for n in a b; do (umask 077; wg genkey > k$n); done
wg set hfwga private-key ka listen-port 51820 peer $(wg pubkey < kb) allowed-ips 10.99.0.2/32 endpoint 10.98.0.2:51820
wg set hfwgb private-key kb listen-port 51820 peer $(wg pubkey < ka) allowed-ips 10.99.0.1/32 endpoint 10.98.0.1:51820
ip -n hfwa addr add 10.99.0.1/24 dev hfwga; ip -n hfwb addr add 10.99.0.2/24 dev hfwgb
ip -n hfwa link set hfwga up; ip -n hfwb link set hfwgb up
cat > xfer.py <<'P'
import socket,sys,time
if sys.argv[1]=="s":
    l=socket.create_server((sys.argv[2],7001)); c,_=l.accept(); b=bytearray(1<<20)
    while c.recv_into(b): pass
    c.sendall(b"x")
else:
    for _ in range(100):
        try: c=socket.create_connection((sys.argv[2],7001)); break
        except OSError: time.sleep(.1)
    t=time.time(); d=bytes(1<<20)
    for _ in range(300): c.sendall(d)
    c.shutdown(1); c.recv(1); s=time.time()-t
    print(sys.argv[2], f"{300*1.048576/s:.0f} MB/s")
P
for ip in 10.98.0.2 10.99.0.2; do
 ip netns exec hfwb python3 xfer.py s $ip & S=$!
 ip netns exec hfwa python3 xfer.py c $ip; wait $S
 awk '{print "wireguard-go, CPU s so far", ($14+$15)/100}' /proc/$PA/stat /proc/$PB/stat
done
rm -f ka kb xfer.py
