package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync/atomic"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/rs/zerolog"
)

// proxies makes TCP proxies whose connections can be cut and slowed.
type proxies struct{ server *toxiproxy.ApiServer }

func newProxies() *proxies {
	zerolog.SetGlobalLevel(zerolog.Disabled) // toxics write to the global logger
	return &proxies{toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())}
}

type proxy struct{ *toxiproxy.Proxy }

// open starts a proxy in front of an address.
func (p *proxies) open(name, upstream string) (proxy, error) {
	listen, err := freeAddress()
	if err != nil {
		return proxy{}, err
	}
	x := proxy{toxiproxy.NewProxy(p.server, name, listen, upstream)}
	return x, x.Start()
}

// poison adds a toxic; direction is upstream (to MySQL) or downstream.
func (p proxy) poison(name, kind, direction string, attributes map[string]any) error {
	b, err := json.Marshal(map[string]any{"name": name, "type": kind, "stream": direction, "attributes": attributes})
	if err != nil {
		return err
	}
	_, err = p.Toxics.AddToxicJson(bytes.NewReader(b))
	return err
}

// heal removes a toxic.
func (p proxy) heal(name string) { _ = p.Toxics.RemoveToxic(context.Background(), name) } // its one error: it is not there

// freeAddress finds a port below those that the system gives to outgoing connections, so that it is still free when its
// process starts, and when it starts again. Ports are tried in turn: one given a moment ago may not be listened on yet.
func freeAddress() (string, error) {
	var err error
	for range 100 {
		address := net.JoinHostPort("127.0.0.1", strconv.FormatInt(12000+lastPort.Add(1)%8000, 10))
		var l net.Listener
		if l, err = net.Listen("tcp", address); err == nil {
			return address, l.Close()
		}
	}
	return "", fmt.Errorf("finding a free port: %w", err)
}

var lastPort atomic.Int64

func init() { lastPort.Store(rand.Int64N(8000)) } // another place than a run beside this one

// commitToxic closes connections that send COMMIT: before it is passed on, so that the server rolls back, or right after, so
// that the server commits and nobody hears of it. Every second COMMIT passes.
type commitToxic struct {
	After bool `json:"after"`
	turn  atomic.Int64
}

// commitsCut counts, for the report.
var commitsCut atomic.Int64

func init() { toxics.Register("commit", new(commitToxic)) }

// commitPacket is COMMIT in MySQL's protocol: length, sequence number, COM_QUERY, text. A client waits for the answers to the
// statements before, so it always stands at the beginning of a chunk.
var commitPacket = []byte("\x07\x00\x00\x00\x03COMMIT")

// Pipe passes data on until a COMMIT comes.
func (t *commitToxic) Pipe(stub *toxics.ToxicStub) {
	for {
		select {
		case <-stub.Interrupt:
			return
		case c := <-stub.Input:
			if c == nil {
				stub.Close()
				return
			}
			cut := bytes.HasPrefix(c.Data, commitPacket) && t.turn.Add(1)%2 == 1
			if !cut || t.After {
				stub.Output <- c
			}
			if cut {
				commitsCut.Add(1)
				stub.Close() // closes the connection to MySQL, and then the client's, before an fsync can have ended
				return
			}
		}
	}
}
