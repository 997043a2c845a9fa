package admission

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Under overload, whoever would be answered too late is told so at once, and those who are served were not kept waiting for
// longer than the patience. With the overload over, everybody is served again.
func TestAQueueShedsWhatWouldBeLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		const batchTakes = 500 * time.Millisecond
		queue := NewQueue(1_000_000, func(int) int { return 1 }, func(_ context.Context, batch []int) ([]int, error) {
			time.Sleep(batchTakes)
			return batch, nil
		})
		go queue.Run(ctx)
		var mu sync.Mutex
		var served, shed int
		ask := func() {
			began := time.Now()
			_, err := queue.Ask(ctx, 1)
			mu.Lock()
			defer mu.Unlock()
			switch waited := time.Since(began); {
			case err == nil:
				if served++; waited > patience+batchTakes {
					t.Errorf("served after %v", waited)
				}
			case errors.Is(err, ErrFull):
				if shed++; waited > patience+batchTakes {
					t.Errorf("refused after %v", waited)
				}
			default:
				t.Errorf("answered with %v", err)
			}
		}
		// Five times as many as can be served, for ten seconds.
		const askers = 5 * maxBatch / 5
		for range 100 {
			for range askers {
				go ask()
			}
			time.Sleep(batchTakes / 5)
		}
		time.Sleep(2 * patience)
		mu.Lock()
		if total := served + shed; total != 100*askers || served < 15*maxBatch || shed < 50*maxBatch {
			t.Errorf("%d were served and %d refused of %d", served, shed, 100*askers)
		}
		served, shed = 0, 0
		mu.Unlock()
		for range 100 {
			go ask()
			time.Sleep(batchTakes)
		}
		time.Sleep(patience)
		mu.Lock()
		defer mu.Unlock()
		if served != 100 || shed != 0 {
			t.Errorf("after the overload %d were served and %d refused", served, shed)
		}
	})
}
