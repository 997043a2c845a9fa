// Package admission is what happens to a request before the database: the watch on the sale, from which memory
// may say no, and the queue where requests wait to share one transaction.
//
// Memory may say "no" or "ask the database". It never says "yes".
package admission

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
)

const (
	pollInterval = 100 * time.Millisecond // units that came back are seen by all pods within this and a query's time
	staleAfter   = time.Second            // an older view proves nothing
)

// View is what a pod knows of its sale: a snapshot, and by the pod's monotonic clock when it was asked for and arrived.
type View struct {
	inventory.Snapshot
	Asked, Arrived time.Time
	// AllBuyers says that every buyer who had a reservation by then is among the watch's Buyers.
	AllBuyers bool
}

// Bounds gives the earliest and latest time the database's clock can show at the pod's local instant now. The pod's own
// time of day does not matter.
func (v *View) Bounds(now time.Time) (earliest, latest time.Time) {
	return v.Now.Add(now.Sub(v.Arrived)), v.Now.Add(now.Sub(v.Asked))
}

// Judge says what memory may answer a request for quantity units at the pod's local instant now; 0 means: ask the
// database. The answers are of outcomes that are refusals.
func (v *View) Judge(now time.Time, quantity int) inventory.Outcome {
	if v == nil || now.Sub(v.Asked) > staleAfter {
		return 0
	}
	earliest, latest := v.Bounds(now)
	switch {
	case v.Gate(earliest) == inventory.GateClosed:
		return inventory.OutcomeClosed
	case v.Gate(latest) == inventory.GateNotOpen:
		return inventory.OutcomeNotOpen
	case v.Gate(latest) == inventory.GateSuspended:
		return inventory.OutcomeSuspended
	case v.Gate(latest) != inventory.GateOpen, v.Loaded < v.Units, v.Available >= int64(quantity):
		return 0
	case !v.NextLapse.IsZero() && !v.NextLapse.After(latest):
		return 0 // an expired hold can be claimed at once
	case v.Available+v.Held >= int64(quantity):
		return inventory.OutcomeAllHeld
	}
	return inventory.OutcomeSoldOut
}

// Watch keeps the view of one sale fresh. Its one writer applies snapshots in the order they were taken, so that an old
// "empty" never overwrites a newer "units came back".
type Watch struct {
	store *inventory.Store
	sale  uuid.UUID
	log   *slog.Logger
	seen  func(*View)
	view  atomic.Pointer[View]
	nudge chan struct{}
	// Buyers are those who have had a reservation. Whoever makes reservations adds their buyers before they are answered.
	Buyers *Buyers
}

// NewWatch makes one; Run keeps it, and calls seen with each new view, one at a time.
func NewWatch(store *inventory.Store, sale uuid.UUID, log *slog.Logger, seen func(*View)) *Watch {
	return &Watch{store: store, sale: sale, log: log, seen: seen, nudge: make(chan struct{}, 1), Buyers: newBuyers()}
}

// View is the newest view; nil before the first.
func (w *Watch) View() *View { return w.view.Load() }

// Nudge asks for a look at once: units came back.
func (w *Watch) Nudge() {
	select {
	case w.nudge <- struct{}{}:
	default:
	}
}

// Run looks at the sale until the context ends. overdue is called when holds are still live a second after their time:
// the sweeper is late, or dead.
func (w *Watch) Run(ctx context.Context, overdue func(context.Context)) {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	failing := false
	for {
		v, err := w.look(ctx)
		switch {
		case err == nil:
			if failing {
				w.log.Info("read the sale again")
			}
			failing = false
			w.view.Store(v)
			w.seen(v)
			if !v.NextLapse.IsZero() && v.Now.Sub(v.NextLapse) > time.Second {
				overdue(ctx)
			}
		case ctx.Err() != nil:
			return
		case !failing:
			w.log.Warn("could not read the sale, will keep trying", "error", err)
			failing = true
		}
		select {
		case <-ticker.C:
		case <-w.nudge:
		case <-ctx.Done():
			return
		}
	}
}

func (w *Watch) look(ctx context.Context) (*View, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	asked := time.Now()
	snap, err := w.store.Snapshot(ctx, w.sale)
	if err != nil {
		return nil, err
	}
	v := &View{Snapshot: *snap, Asked: asked, Arrived: time.Now()}
	v.AllBuyers, err = w.Buyers.allKnown(ctx, w.store, v)
	return v, err
}
