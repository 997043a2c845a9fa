package admission

import (
	"context"
	"errors"
	"time"

	"flashsale.dev/operator/reserver/inventory"
)

// ErrFull means that the queue has no place: the pod is overloaded.
var ErrFull = errors.New("the queue is full")

const (
	maxBatch      = 512  // requests that share a transaction
	maxBatchUnits = 4000 // units that one transaction moves
	batchTimeout  = 5 * time.Second
)

// Serve answers a batch of requests, in their order.
type Serve func(ctx context.Context, batch []inventory.Request) ([]inventory.Result, error)

// Queue is where requests wait to share one transaction: while a commit is in flight, arrivals queue; the next batch takes
// them all. An idle queue serves at once.
type Queue struct {
	serve   Serve
	waiting chan *waiter
}

type waiter struct {
	request inventory.Request
	ctx     context.Context
	answer  chan answer // has room for the one answer, so that a waiter who left blocks nobody
}

type answer struct {
	result inventory.Result
	err    error
}

// NewQueue makes a queue with room for places waiting requests.
func NewQueue(places int, serve Serve) *Queue {
	return &Queue{serve: serve, waiting: make(chan *waiter, places)}
}

// Waiting is how many requests wait.
func (l *Queue) Waiting() int { return len(l.waiting) }

// Ask waits for the answer to one request. It returns ErrFull without waiting when there is no place, and the context's
// error when the caller leaves first.
func (l *Queue) Ask(ctx context.Context, r inventory.Request) (inventory.Result, error) {
	w := &waiter{request: r, ctx: ctx, answer: make(chan answer, 1)}
	select {
	case l.waiting <- w:
	default:
		return inventory.Result{}, ErrFull
	}
	select {
	case a := <-w.answer:
		return a.result, a.err
	case <-ctx.Done():
		return inventory.Result{}, ctx.Err()
	}
}

// Run serves the queue until the context ends.
func (l *Queue) Run(ctx context.Context) {
	var held *waiter // did not fit into the batch before
	for {
		first := held
		held = nil
		if first == nil {
			select {
			case first = <-l.waiting:
			case <-ctx.Done():
				return
			}
		}
		var batch []*waiter
		units := 0
		for w := first; w != nil; {
			switch {
			case w.ctx.Err() != nil: // left: a unit would be held for nobody
			case units > 0 && units+w.request.Quantity > maxBatchUnits:
				held = w
			default:
				batch, units = append(batch, w), units+w.request.Quantity
			}
			w = nil
			if held == nil && len(batch) < maxBatch {
				select {
				case w = <-l.waiting:
				default:
				}
			}
		}
		if len(batch) > 0 {
			l.serveBatch(ctx, batch)
		}
	}
}

func (l *Queue) serveBatch(ctx context.Context, batch []*waiter) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	requests := make([]inventory.Request, len(batch))
	for i, w := range batch {
		requests[i] = w.request
	}
	results, err := l.serve(ctx, requests)
	for i, w := range batch {
		a := answer{err: err}
		if err == nil {
			a.result = results[i]
		}
		w.answer <- a
	}
}
