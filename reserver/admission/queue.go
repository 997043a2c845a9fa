package admission

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// ErrFull means that the queue has no place, or so long a wait that the answer would come too late: the pod is overloaded.
var ErrFull = errors.New("the queue is full")

const (
	maxBatch      = 1024 // requests that share a transaction
	maxBatchUnits = 4000 // units that one transaction moves
	worthwhile    = 256  // requests, at least, for which a transaction is made beside another
	batchTimeout  = 5 * time.Second
	patience      = 3 * time.Second // longest wait for a batch; whoever would wait longer is told so at once
)

// Serve answers a batch of requests, in their order.
type Serve[Q, A any] func(ctx context.Context, batch []Q) ([]A, error)

// Queue is where requests wait to share one transaction: while a commit is in flight, arrivals queue; the next batch takes
// them all. An idle queue serves at once. With several serves, a large batch is made while the one before waits for the disk; a
// small one waits until that is done, because each transaction has a cost of its own, and pods share the database.
type Queue[Q, A any] struct {
	units   func(Q) int
	serves  []Serve[Q, A]
	waiting chan *waiter[Q, A]
	wake    chan struct{} // something has arrived, or a serve is free
	late    atomic.Bool   // the batch taken last had waited for more than half of the patience: with as many before him, whoever comes now would wait too long
}

type waiter[Q, A any] struct {
	request Q
	ctx     context.Context
	since   time.Time
	answer  chan answer[A] // has room for the one answer, so that a waiter who left blocks nobody
}

type answer[A any] struct {
	result A
	err    error
}

// NewQueue makes a queue with room for places waiting requests; units says how many units a request moves. Each of serves
// has one batch at a time.
func NewQueue[Q, A any](places int, units func(Q) int, serves ...Serve[Q, A]) *Queue[Q, A] {
	return &Queue[Q, A]{units: units, serves: serves, waiting: make(chan *waiter[Q, A], places), wake: make(chan struct{}, 1)}
}

// Waiting is how many requests wait.
func (l *Queue[Q, A]) Waiting() int { return len(l.waiting) }

// Ask waits for the answer to one request. It returns ErrFull without waiting when there is no place, or those who wait already
// wait too long, and the context's error when the caller leaves first.
func (l *Queue[Q, A]) Ask(ctx context.Context, r Q) (result A, err error) {
	w := &waiter[Q, A]{request: r, ctx: ctx, since: time.Now(), answer: make(chan answer[A], 1)}
	if l.late.Load() && len(l.waiting) > 0 {
		return result, ErrFull
	}
	select {
	case l.waiting <- w:
		l.signal()
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

func (l *Queue[Q, A]) signal() {
	select {
	case l.wake <- struct{}{}:
	default: // somebody did
	}
}

// Run serves the queue until the context ends.
func (l *Queue[Q, A]) Run(ctx context.Context) {
	idle := make(chan Serve[Q, A], len(l.serves))
	for _, serve := range l.serves {
		idle <- serve
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	var held *waiter[Q, A] // did not fit into the batch before
	last := 0              // size of the batch before
	for {
		select {
		case <-l.wake:
		case <-ctx.Done():
			return
		}
		runtime.Gosched() // those who were answered together ask again together: the first is not to be served alone
		for {
			n, free := len(l.waiting), len(idle)
			if held != nil {
				n++
			}
			if n == 0 || free == 0 || free < len(l.serves) && n < max(worthwhile, last/2) {
				break
			}
			var batch []*waiter[Q, A]
			batch, held = l.next(held, min(maxBatch, max(worthwhile, n/len(l.serves)))) // what waits is shared among the serves
			last = len(batch)
			serve := <-idle
			wg.Go(func() {
				answerBatch(ctx, serve, batch)
				idle <- serve
				l.signal()
			})
		}
	}
}

// next takes a batch of up to most from the queue, first what is held; that one that does not fit is held for the next.
func (l *Queue[Q, A]) next(held *waiter[Q, A], most int) (batch []*waiter[Q, A], over *waiter[Q, A]) {
	units, now := 0, time.Now()
	defer func() { l.late.Store(len(batch) > 0 && now.Sub(batch[0].since) > patience/2) }()
	for w := held; len(batch) < most; w = nil {
		if w == nil {
			select {
			case w = <-l.waiting:
			default:
				return batch, nil
			}
		}
		if w.ctx.Err() != nil { // left: a unit would be held for nobody
			continue
		}
		if now.Sub(w.since) > patience {
			w.answer <- answer[A]{err: ErrFull}
			continue
		}
		if units += l.units(w.request); units > maxBatchUnits && len(batch) > 0 {
			return batch, w
		}
		batch = append(batch, w)
	}
	return batch, nil
}

func answerBatch[Q, A any](ctx context.Context, serve Serve[Q, A], batch []*waiter[Q, A]) {
	if len(batch) == 0 {
		return
	}
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
