// Package webhook tells the shop what happened in a sale: it takes events from the outbox, which the transactions that made
// them wrote, and posts each as a CloudEvent (structured JSON), signed as Standard Webhooks say, at least once.
package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"flashsale.dev/operator/reserver/inventory"
)

const (
	pollInterval = 500 * time.Millisecond // between two looks into an empty outbox
	inFlight     = 16                     // requests at once
	answerLimit  = 10 * time.Second       // for one request
	lease        = 2 * time.Minute        // longer than a delivery can take, so that no two publishers send the same
	longestRetry = time.Minute
)

// Publisher delivers the events of one sale. Any number of publishers may run for it.
type Publisher struct {
	Store      *inventory.Store
	Sale       uuid.UUID
	URL        string
	SecretFile string // holds whsec_ and the key in base64; read again for each delivery, so that it can be rotated
	Log        *slog.Logger

	client    *http.Client
	failures  int // deliveries that failed, since the last that did not
	delivered prometheus.Counter
	failed    prometheus.Counter
}

// Run delivers until the context ends. A webhook that does not answer is tried again ever more slowly, to once a minute;
// its events wait in the outbox. So does, on its own, an event that alone is refused.
func (p *Publisher) Run(ctx context.Context, registry *prometheus.Registry) {
	count := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "flashsale_webhook_requests_total", Help: "Events posted, by result."}, []string{"result"})
	registry.MustRegister(count)
	p.delivered, p.failed = count.WithLabelValues("delivered"), count.WithLabelValues("failed")
	p.client = &http.Client{
		Timeout:       answerLimit,
		Transport:     &http.Transport{MaxIdleConnsPerHost: inFlight, IdleConnTimeout: time.Minute, Proxy: http.ProxyFromEnvironment},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	last := ""
	for ctx.Err() == nil {
		wait, err := p.deliver(ctx)
		switch {
		case err == nil:
			if last != "" {
				p.Log.Info("delivered events again")
			}
			last = ""
		case ctx.Err() == nil && err.Error() != last:
			last = err.Error()
			p.Log.Warn("could not deliver events, will keep trying", "error", err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// deliver posts the oldest events that are due, and says how long to wait before the next.
func (p *Publisher) deliver(ctx context.Context) (wait time.Duration, err error) {
	secret, err := os.ReadFile(p.SecretFile)
	if err != nil {
		return longestRetry / 10, fmt.Errorf("reading the webhook's secret: %w", err)
	}
	signer, err := standardwebhooks.NewWebhook(strings.TrimSpace(string(secret)))
	if err != nil {
		return longestRetry / 10, fmt.Errorf("reading the webhook's secret: it must be whsec_ and a key in base64: %w", err)
	}
	d, err := p.Store.LeaseEvents(ctx, p.Sale, lease)
	if d == nil || err != nil {
		return pollInterval, err
	}
	delivered, err := p.post(ctx, signer, d.Events)
	// Also when the context has ended: what was delivered should not be sent again.
	finish, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerLimit)
	defer cancel()
	if finishErr := p.Store.FinishEvents(finish, d, delivered, backoff(d.Attempts)); finishErr != nil {
		return pollInterval, finishErr
	}
	if err != nil {
		p.failures++
		return backoff(p.failures - 1), err
	}
	p.failures = 0
	return 0, nil
}

// backoff is how long to wait after a number of failures: 1 s, doubled with each, to a minute, less up to a fifth by chance.
func backoff(failures int) time.Duration {
	d := min(time.Second<<min(failures, 10), longestRetry)
	return d - rand.N(d/5)
}

// post sends events at once, and says how many of the first ones arrived. The first failure keeps those after it from
// being sent.
func (p *Publisher) post(ctx context.Context, signer *standardwebhooks.Webhook, events []inventory.Event) (delivered int, err error) {
	errs := make([]error, len(events))
	next := make(chan int)
	stop := make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	for range min(inFlight, len(events)) {
		wg.Go(func() {
			for i := range next {
				if errs[i] = p.send(ctx, signer, events[i]); errs[i] != nil {
					p.failed.Inc()
					once.Do(func() { close(stop) })
					return
				}
				p.delivered.Inc()
			}
		})
	}
	sent := 0
feed:
	for ; sent < len(events); sent++ {
		select {
		case next <- sent:
		case <-stop:
			break feed
		}
	}
	close(next)
	wg.Wait()
	for delivered < sent && errs[delivered] == nil {
		delivered++
	}
	if delivered < sent {
		err = errs[delivered]
	}
	return delivered, err
}

// cloudEvent is the JSON format of CloudEvents 1.0.
type cloudEvent struct {
	SpecVersion     string    `json:"specversion"`
	ID              string    `json:"id"`
	Source          string    `json:"source"`
	Type            string    `json:"type"`
	Subject         string    `json:"subject,omitempty"` // the reservation's id
	Time            time.Time `json:"time"`
	DataContentType string    `json:"datacontenttype"`
	Data            data      `json:"data"`
}

type data struct {
	SaleID      uuid.UUID        `json:"saleId"`
	SKU         string           `json:"sku"`
	Reservation *reservationData `json:"reservation,omitempty"`
}

type reservationData struct {
	ID        uuid.UUID `json:"id"`
	State     string    `json:"state"` // that the event tells of
	Buyer     string    `json:"buyer,omitempty"`
	Quantity  int       `json:"quantity,omitempty"`
	GrantedAt time.Time `json:"grantedAt,omitzero"`
	ExpiresAt time.Time `json:"expiresAt,omitzero"`
	PaymentID string    `json:"paymentId,omitempty"`
	Reason    string    `json:"reason,omitempty"`
}

func encode(e inventory.Event) ([]byte, error) {
	ce := cloudEvent{SpecVersion: "1.0", ID: e.ID, Source: "/flashsales/" + e.Sale.Name, Type: e.Type, Time: e.At,
		DataContentType: "application/json", Data: data{SaleID: e.Sale.ID, SKU: e.Sale.SKU}}
	if r := e.Reservation; r != nil {
		ce.Subject = r.ID.String()
		ce.Data.Reservation = &reservationData{r.ID, r.State.String(), r.Buyer, r.Quantity, r.GrantedAt, r.ExpiresAt, r.PaymentID, r.Reason}
	}
	return json.Marshal(ce)
}

func (p *Publisher) send(ctx context.Context, signer *standardwebhooks.Webhook, e inventory.Event) error {
	body, err := encode(e)
	if err != nil {
		return fmt.Errorf("encoding event %s: %w", e.ID, err)
	}
	now := time.Now()
	signature, err := signer.Sign(e.ID, now, body)
	if err != nil {
		return fmt.Errorf("signing event %s: %w", e.ID, err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("posting an event: %w", err)
	}
	request.Header.Set("Content-Type", "application/cloudevents+json; charset=utf-8")
	request.Header.Set("User-Agent", "FlashSale")
	request.Header.Set(standardwebhooks.HeaderWebhookID, e.ID)
	request.Header.Set(standardwebhooks.HeaderWebhookTimestamp, fmt.Sprint(now.Unix()))
	request.Header.Set(standardwebhooks.HeaderWebhookSignature, signature)
	response, err := p.client.Do(request)
	if err != nil {
		return fmt.Errorf("posting an event: %w", err)
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 64<<10)) // so that the connection can be used again
	_ = response.Body.Close()
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("posting an event: the webhook answered %s", response.Status)
	}
	return nil
}
