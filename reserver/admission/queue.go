package admission

import (
	"context"
	"errors"
	"sync"
	"time"
)

// ErrFull means that the queue has no place: the pod is overloaded.
var ErrFull = errors.New("the queue is full")

const (
	maxBatch      = 1024 // requests that share a transaction
	maxBatchUnits = 4000 // units that one transaction moves
	batchTimeout  = 5 * time.Second
)

// Serve answers a batch of requests, in their order.
type Serve[Q, A any] func(ctx context.Context, batch []Q) ([]A, error)

// Queue is where requests wait to share one transaction: while a commit is in flight, arrivals queue; the next batch takes
// them all. An idle queue serves at once. With several serves, the next batch is made while the one before waits for the
// disk.
type Queue[Q, A any] struct {
	units   func(Q) int
	serves  []Serve[Q, A]
	waiting chan *waiter[Q, A]
}

type waiter[Q, A any] struct {
	request Q
	ctx     context.Context
	answer  chan answer[A] // has room for the one answer, so that a waiter who left blocks nobody
}

type answer[A any] struct {
	result A
	err    error
}

// NewQueue makes a queue with room for places waiting requests; units says how many units a request moves. Each of serves
// has one batch at a time.
func NewQueue[Q, A any](places int, units func(Q) int, serves ...Serve[Q, A]) *Queue[Q, A] {
	return &Queue[Q, A]{units: units, serves: serves, waiting: make(chan *waiter[Q, A], places)}
}

// Waiting is how many requests wait.
func (l *Queue[Q, A]) Waiting() int { return len(l.waiting) }

// Ask waits for the answer to one request. It returns ErrFull without waiting when there is no place, and the context's
// error when the caller leaves first.
func (l *Queue[Q, A]) Ask(ctx context.Context, r Q) (result A, err error) {
	w := &waiter[Q, A]{request: r, ctx: ctx, answer: make(chan answer[A], 1)}
	select {
	case l.waiting <- w:
	default:
		return result, ErrFull
	}
	select {
	case a := <-w.answer:
		return a.result, a.err
	case <-ctx.Done():
		return result, ctx.Err()
	}
}

// Run serves the queue until the context ends.
func (l *Queue[Q, A]) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, serve := range l.serves {
		wg.Go(func() { l.run(ctx, serve) })
	}
	wg.Wait()
}

func (l *Queue[Q, A]) run(ctx context.Context, serve Serve[Q, A]) {
	var held *waiter[Q, A] // did not fit into the batch before
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
		var batch []*waiter[Q, A]
		units := 0
		for w := first; w != nil; {
			switch {
			case w.ctx.Err() != nil: // left: a unit would be held for nobody
			case units > 0 && units+l.units(w.request) > maxBatchUnits:
				held = w
			default:
				batch, units = append(batch, w), units+l.units(w.request)
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
			answerBatch(ctx, serve, batch)
		}
	}
}

func answerBatch[Q, A any](ctx context.Context, serve Serve[Q, A], batch []*waiter[Q, A]) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	requests := make([]Q, len(batch))
	for i, w := range batch {
		requests[i] = w.request
	}
	results, err := serve(ctx, requests)
	for i, w := range batch {
		a := answer[A]{err: err}
		if err == nil {
			a.result = results[i]
		}
		w.answer <- a
	}
}
