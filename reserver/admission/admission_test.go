package admission

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

func TestJudge(t *testing.T) {
	start := time.Date(2026, 12, 1, 4, 30, 0, 0, time.UTC)
	local := time.Now()
	// view is of a sale of 5 units between start and start+30m, asked for 20 ms and arrived 10 ms before local.
	view := func(now time.Time, change func(*View)) *View {
		v := &View{Asked: local.Add(-20 * time.Millisecond), Arrived: local.Add(-10 * time.Millisecond)}
		v.StartsAt, v.EndsAt, v.LoadedAt, v.Now = start, start.Add(30*time.Minute), start.Add(-time.Hour), now
		v.Units, v.Loaded, v.Held = 5, 5, 5
		v.NextLapse = now.Add(time.Minute)
		if change != nil {
			change(v)
		}
		return v
	}
	live := start.Add(time.Minute)
	for name, tt := range map[string]struct {
		view     *View
		quantity int
		want     inventory.Outcome
	}{
		"nothing is known yet":  {nil, 1, 0},
		"the view is old":       {view(live, func(v *View) { v.Asked = local.Add(-2 * time.Second) }), 1, 0},
		"well before the start": {view(start.Add(-time.Second), nil), 1, inventory.OutcomeNotOpen},
		"the start may have come since the view was asked for": {view(start.Add(-15*time.Millisecond), func(v *View) { v.Available, v.Held = 5, 0 }), 1, 0},
		"the start has surely not come":                        {view(start.Add(-21*time.Millisecond), nil), 1, inventory.OutcomeNotOpen},
		"still loading after the start":                        {view(live, func(v *View) { v.LoadedAt = time.Time{} }), 1, inventory.OutcomeNotOpen},
		"units are available":                                  {view(live, func(v *View) { v.Available, v.Held = 1, 4 }), 1, 0},
		"fewer are available than asked for, others are held":  {view(live, func(v *View) { v.Available, v.Held = 1, 4 }), 2, inventory.OutcomeAllHeld},
		"all are held":                       {view(live, nil), 1, inventory.OutcomeAllHeld},
		"all are held, one has just expired": {view(live, func(v *View) { v.NextLapse = live.Add(15 * time.Millisecond) }), 1, 0},
		"all are sold":                       {view(live, func(v *View) { v.Held, v.Sold, v.NextLapse = 0, 5, time.Time{} }), 1, inventory.OutcomeSoldOut},
		"fewer are left than asked for":      {view(live, func(v *View) { v.Held, v.Sold = 2, 3 }), 3, inventory.OutcomeSoldOut},
		"more units are being loaded":        {view(live, func(v *View) { v.Held, v.Sold, v.Units = 0, 5, 6 }), 1, 0},
		"suspended":                          {view(live, func(v *View) { v.Suspended = true }), 1, inventory.OutcomeSuspended},
		"the object is being deleted":        {view(live, func(v *View) { v.Draining = true }), 1, inventory.OutcomeClosed},
		"the end has come":                   {view(start.Add(30*time.Minute), nil), 1, inventory.OutcomeClosed},
		"the end may have come, by the time of the view's trip": {view(start.Add(30*time.Minute-15*time.Millisecond), func(v *View) { v.Available, v.Held = 5, 0 }), 1, 0},
		"closed": {view(live, func(v *View) { v.ClosedAt = live }), 1, inventory.OutcomeClosed},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tt.view.Judge(local, tt.quantity); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func quantity(r inventory.Request) int { return r.Quantity }

// While a batch is served, arrivals wait; the next batch takes them all, up to the limit.
func TestArrivalsShareTheNextBatch(t *testing.T) {
	var mu sync.Mutex
	var sizes []int
	entered, leave := make(chan struct{}, 100), make(chan struct{})
	line := NewQueue(2000, quantity, func(_ context.Context, batch []inventory.Request) ([]inventory.Result, error) {
		mu.Lock()
		sizes = append(sizes, len(batch))
		mu.Unlock()
		entered <- struct{}{}
		<-leave
		results := make([]inventory.Result, len(batch))
		for i, r := range batch {
			results[i].AlreadySold = r.Quantity
		}
		return results, nil
	})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go line.Run(ctx)
	var wg sync.WaitGroup
	ask := func(quantity int) {
		wg.Go(func() {
			r, err := line.Ask(ctx, inventory.Request{Quantity: quantity})
			if err != nil || r.AlreadySold != quantity {
				t.Errorf("request %d got %+v, %v", quantity, r, err)
			}
		})
	}
	ask(1)
	<-entered // an idle line serves one at once
	for i := range 600 {
		ask(i%5 + 1)
	}
	testmysql.Eventually(t, "600 wait", func() bool { return line.Waiting() == 600 })
	close(leave)
	wg.Wait()
	if want := fmt.Sprint([]int{1, 600}); fmt.Sprint(sizes) != want {
		t.Errorf("batches %v, want %s", sizes, want)
	}
}

// Two serves: a small batch waits for the one in flight, a large one is made beside it, and what waits is shared.
func TestASecondBatchMustBeWorthIt(t *testing.T) {
	for name, tt := range map[string]struct {
		first, then int
		want        [2]int // sizes of the batches
	}{
		"one is in flight":   {1, worthwhile, [2]int{1, worthwhile}},
		"many wait together": {600, 0, [2]int{worthwhile, 300}}, // half of them, and most of the other half
	} {
		t.Run(name, func(t *testing.T) {
			entered, leave := make(chan int, 2), make(chan struct{})
			serve := func(_ context.Context, batch []inventory.Request) ([]inventory.Result, error) {
				entered <- len(batch)
				<-leave
				return make([]inventory.Result, len(batch)), nil
			}
			queue := NewQueue(2000, quantity, serve, serve)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			var wg sync.WaitGroup
			ask := func(n int) {
				for range n {
					wg.Go(func() {
						if _, err := queue.Ask(ctx, inventory.Request{Quantity: 1}); err != nil {
							t.Error(err)
						}
					})
				}
			}
			ask(tt.first)
			testmysql.Eventually(t, "the first wait", func() bool { return queue.Waiting() == tt.first })
			go queue.Run(ctx)
			first := <-entered
			ask(tt.then)
			if second := <-entered; [2]int{min(first, second), max(first, second)} != tt.want {
				t.Errorf("batches of %d and %d requests, want %v", first, second, tt.want)
			}
			close(leave)
			wg.Wait()
		})
	}
}

func TestABatchIsBoundedInUnits(t *testing.T) {
	var sizes []int
	line := NewQueue(10, quantity, func(_ context.Context, batch []inventory.Request) ([]inventory.Result, error) {
		sizes = append(sizes, len(batch))
		return make([]inventory.Result, len(batch)), nil
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 9 {
		wg.Go(func() {
			if _, err := line.Ask(ctx, inventory.Request{Quantity: 1000}); err != nil {
				t.Error(err)
			}
		})
	}
	testmysql.Eventually(t, "nine wait", func() bool { return line.Waiting() == 9 })
	go line.Run(ctx)
	wg.Wait()
	cancel()
	if want := "[4 4 1]"; fmt.Sprint(sizes) != want {
		t.Errorf("batches %v, want %s", sizes, want)
	}
}

func TestAFullLineSaysSoAtOnce(t *testing.T) {
	line := NewQueue[inventory.Request, inventory.Result](1, quantity, nil) // nobody serves it
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := line.Ask(gone, inventory.Request{}); !errors.Is(err, context.Canceled) {
		t.Errorf("the first caller left: %v", err)
	}
	if _, err := line.Ask(context.Background(), inventory.Request{}); !errors.Is(err, ErrFull) {
		t.Errorf("the second found: %v", err)
	}
}

func TestCallersWhoLeftAreNotServed(t *testing.T) {
	served := make(chan int, 1)
	line := NewQueue(10, quantity, func(_ context.Context, batch []inventory.Request) ([]inventory.Result, error) {
		served <- len(batch)
		return make([]inventory.Result, len(batch)), nil
	})
	gone, leave := context.WithCancel(context.Background())
	leave()
	for range 3 {
		if _, err := line.Ask(gone, inventory.Request{}); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go line.Run(ctx)
	if _, err := line.Ask(ctx, inventory.Request{}); err != nil {
		t.Fatal(err)
	}
	if n := <-served; n != 1 {
		t.Errorf("%d requests were served, want the one whose caller stayed", n)
	}
}
