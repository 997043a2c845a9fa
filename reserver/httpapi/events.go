package httpapi

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync/atomic"
	"time"

	"flashsale.dev/operator/reserver/admission"
)

const (
	maxListeners = 20_000           // streams of events on one pod
	countsEvery  = time.Second      // how often changed counts are told; a changed phase is told at once
	beatEvery    = 15 * time.Second // silence after which proxies might end a stream
	writeLimit   = 10 * time.Second // a listener who takes nothing for so long is let go
)

// event is what all listeners are told: it is made once, whoever listens.
type event struct {
	text    []byte        // in the event stream format of the HTML standard
	renewed chan struct{} // closed when there is a newer event
	stock   stockJSON
	told    time.Time
}

// feed holds the newest event. Its one writer is the watch; a listener who was slow misses what came in between.
type feed struct {
	newest    atomic.Pointer[event]
	listeners atomic.Int64
	ended     chan struct{} // closed when the pod shuts down
}

// tell makes an event of a view, when it differs from the one before by more than time.
func (s *Server) tell(v *admission.View) {
	now := time.Now()
	before, stock := s.feed.newest.Load(), stockOf(v, now)
	if before != nil && (same(before.stock, stock) || before.stock.Phase == stock.Phase && now.Sub(before.told) < countsEvery) {
		return
	}
	s.feed.newest.Store(&event{text: fmt.Appendf(nil, "event: stock\ndata: %s\n", encode(stock)), renewed: make(chan struct{}), stock: stock, told: now})
	if before != nil {
		close(before.renewed)
	}
}

// same says that two stocks differ by the time of day only.
func same(a, b stockJSON) bool {
	at := func(t *time.Time) time.Time {
		if t == nil {
			return time.Time{}
		}
		return *t
	}
	return a.Phase == b.Phase && a.Units == b.Units && a.Available == b.Available && a.Held == b.Held && a.Sold == b.Sold &&
		a.StartsAt.Equal(b.StartsAt) && at(a.EndsAt).Equal(at(b.EndsAt)) && at(a.NextExpiry).Equal(at(b.NextExpiry))
}

// events answers GET /v1/events with a stream of server-sent events (HTML standard, section 9.2) from memory.
func (s *Server) events(w http.ResponseWriter, r *http.Request) string {
	e := s.feed.newest.Load()
	if e == nil || s.ending.Load() {
		return refuse(w, problemUnavailable)
	}
	defer s.feed.listeners.Add(-1)
	if s.feed.listeners.Add(1) > maxListeners {
		return refuse(w, problemListeners)
	}
	stream := http.NewResponseController(w)
	// The server's limits are for requests that end.
	if err := stream.SetReadDeadline(time.Time{}); err != nil {
		return s.fail(w, r, "stream events", err)
	}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // some proxies would keep events back
	send := func(text []byte) bool {
		_ = stream.SetWriteDeadline(time.Now().Add(writeLimit))
		_, err := w.Write(text)
		return err == nil && stream.Flush() == nil
	}
	// Clients whose stream ended come back spread over seconds.
	if !send(fmt.Appendf(nil, "retry: %d\n\n", 1000+rand.N(2000))) {
		return "left"
	}
	beat := time.NewTimer(beatEvery)
	defer beat.Stop()
	for send(e.text) {
		for told := e; e == told; {
			beat.Reset(beatEvery)
			select {
			case <-e.renewed:
				e = s.feed.newest.Load()
			case <-beat.C:
				if !send([]byte(":\n\n")) {
					return "left"
				}
			case <-s.feed.ended:
				return "ended"
			case <-r.Context().Done():
				return "left"
			}
		}
	}
	return "left"
}
